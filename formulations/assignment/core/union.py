"""Connected parts by union and find: each node points to another of its part, a root to itself."""


def root(parent: list[int], node: int) -> int:
    """The root of a node's part; paths are halved on the way, in place."""
    while parent[node] != node:
        parent[node] = parent[parent[node]]
        node = parent[node]
    return node
