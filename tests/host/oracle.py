"""What a prefix tree should answer, found by looking at everything."""

from typing import NamedTuple

from jaxcache.layouts import CacheLayout, pages_for
from jaxcache.prefixes.nodes import Node
from jaxcache.prefixes.tree import PrefixTree


class Path(NamedTuple):
    """One way down the tree.

    Attributes:
        tokens: All tokens of the path.
        pages: For each group the pages by index; 0 where there is none.
        begun: For each group the page that holds the tokens after the last whole one.
        begun_end: Up to which token that page is right.
        snapshots: Positions of resident snapshots.
    """

    tokens: list[int]
    pages: list[list[int]]
    begun: list[int]
    begun_end: int
    snapshots: list[int]


def paths(tree: PrefixTree, scope: object) -> list[Path]:
    """Returns the path to each node of a scope."""
    root = tree.residency.roots.get(scope)
    if root is None:
        return []
    return [_path(tree, node) for node in root.walk() if node is not root]


def _path(tree: PrefixTree, node: Node) -> Path:
    nodes = node.path()
    groups = range(tree.pages.num_groups)
    return Path(
        [token for n in nodes for token in n.tokens.tolist()],
        [[page for n in nodes for page in n.pages[g].tolist()] for g in groups],
        [0] * len(groups) if node.tail is None else node.tail.tolist(),
        node.tail_end,
        [s.position for n in nodes for s in n.snapshots if s.is_resident],
    )


def longest_reusable(
    tree: PrefixTree,
    scope: object,
    prompt: list[int],
    layout: CacheLayout,
    copies: bool,
) -> tuple[int, int]:
    """Returns how many tokens can be reused, and how many are known."""
    known = paths(tree, scope)
    limit = len(prompt) - 1
    matched = max((_agreeing(path.tokens, prompt[:limit]) for path in known), default=0)
    page = layout.tokens_per_page
    for n in range(matched, 0, -1):
        alike = [path for path in known if path.tokens[:n] == prompt[:n]]
        if layout.has_recurrent and not any(n in path.snapshots for path in alike):
            continue
        if n % page and layout.num_page_groups and not copies:
            continue
        if all(
            any(_covers(path, n, group, layout) for path in alike)
            for group in range(layout.num_page_groups)
        ):
            return n, matched
    return 0, matched


def _agreeing(tokens: list[int], prompt: list[int]) -> int:
    count = 0
    for ours, theirs in zip(tokens, prompt, strict=False):
        if ours != theirs:
            break
        count += 1
    return count


def _covers(path: Path, n: int, group: int, layout: CacheLayout) -> bool:
    """Whether a path has the pages of a group that a query at position n sees."""
    page = layout.tokens_per_page
    stale = layout.page_groups[group].retention.stale_pages(n, page)
    pages = path.pages[group]
    for index in range(pages_for(n, page)):
        if index in stale:
            continue
        if index < len(pages):
            if not pages[index]:
                return False
        elif index == len(pages) and n <= path.begun_end:
            if not path.begun[group]:
                return False
        else:
            return False
    return True
