"""Work on several processes or machines: the seam, a process pool, and Ray. It knows of no model."""
