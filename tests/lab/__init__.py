"""Jobs on several hosts, which are namespaces of this machine (see ``holdfast.testing.lab``)."""
