"""The command line: arguments become a checked configuration, and what a person sees of a job."""
