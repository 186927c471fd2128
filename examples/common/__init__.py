"""What the example scripts share: command line, run folder, prompts and the Ray session."""
