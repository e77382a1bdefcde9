"""The command line: turns arguments into a checked configuration, and shows people the state of a job."""
