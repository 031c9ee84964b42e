"""What a study costs besides the training that it measures."""
