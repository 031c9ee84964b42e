"""Plan studies, run them on Ray, and store the results."""
