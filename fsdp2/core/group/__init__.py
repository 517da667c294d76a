"""The life cycle of one parameter group. Sees no other group, and no order of groups."""
