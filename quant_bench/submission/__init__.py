"""Records from elsewhere: checked as a results repository's CI does, merged without loss, and published."""
