"""drawbar: language models far larger than memory, exactly, several tokens per pass."""
