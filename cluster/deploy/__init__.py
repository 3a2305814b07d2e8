"""A cluster on Ray: the Ray under it, its actors, the nodes they are on, where they listen now."""
