"""Effect: how one set of times compares with another."""
