"""A model of which each worker of a unit has a part: its layout in each world, and the copies of its last
commits."""
