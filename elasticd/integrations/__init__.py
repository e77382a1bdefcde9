"""What lets the training loops of other libraries keep their place in the data and in the training: one
module for each library. A module imports its library; this package imports none of them."""
