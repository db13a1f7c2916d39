"""The programs that run inside the sandbox. They see the standard library, numpy, PIL, matplotlib, nothing of vrl."""
