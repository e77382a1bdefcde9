"""The values that a script gives to a State, plain data that workers send each other, and random states."""
