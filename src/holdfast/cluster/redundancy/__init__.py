"""The erasure code at work: changes flow to parities, lost rows and parities come back. Pure."""
