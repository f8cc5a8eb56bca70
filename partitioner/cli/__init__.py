"""The command line: one command for each function of the public interface."""
