"""Every error that Holdfast raises on purpose.

    HoldfastError
    ├── ConfigError          a configuration or an option that cannot be meant
    ├── DataError            training data that cannot be read
    │   ├── BadLine          one line of it, with file and line number
    │   └── WrongReaderState a reader was given a state that is not its own
    └── TrainingDiverged     the loss is no longer a number

A message is one sentence that names the thing, what was expected, what was
found, and the cure. Anything else that escapes is a bug in Holdfast.
"""


class HoldfastError(Exception):
    """The root: ``except HoldfastError`` catches all that Holdfast raises on purpose."""


class ConfigError(HoldfastError):
    """A configuration, an option or a combination of them that cannot be meant."""


class DataError(HoldfastError):
    """Training data that is missing, empty or cannot be read."""


class BadLine(DataError):
    """A line of a data file that is not a sample.

    Attributes:
        path: the file.
        line: its line number, from 1.
        reason: what is wrong with it.
    """

    def __init__(self, path: str, line: int, reason: str) -> None:
        super().__init__(f"{path}, line {line}: {reason}")
        self.path = path
        self.line = line
        self.reason = reason


class WrongReaderState(DataError):
    """``load_state_dict`` got a state that another reader wrote, or came too late."""


class TrainingDiverged(HoldfastError):
    """The loss became NaN or infinite: nothing that training does from there on can help."""
