"""What a launch is told beside its operands about how its work may be cut."""

from typing import Any, NamedTuple


class Limits(NamedTuple):
    """Scalars of a launch.

    Attributes:
        max_ctas: CTAs that fill the GPU once.
        max_clustered: CTAs of clusters of more than two that run at once.
        most_splits: pieces of a row tile that the caller wants, 0 for any number.
    """

    max_ctas: Any
    max_clustered: Any
    most_splits: Any
