"""Layout of the cache pools, and the policies over their blocks."""
