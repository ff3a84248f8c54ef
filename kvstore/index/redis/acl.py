"""Users of the index's Redis, one for each role: the keys and commands that its processes need, and no more.

A script may run only the commands that its user may, so these lists follow ``lua_scripts``,
``objects.record_scripts`` and the conductors' announcements.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from hashlib import sha256
from urllib.parse import quote, urlsplit, urlunsplit

from moonpool.kvstore.errors import StoreError
from moonpool.runtime.security.roles import CLIENT, CONDUCTOR, NODE, OPERATOR

# Of connections: redis-py asks for the slots of a Redis Cluster.
_CONNECTION = "ping select cluster|slots command"
_READ = "eval evalsha hget hmget lrange zrange"
_FOLLOW = f"{_READ} time hsetnx hdel unlink zrangebyscore xread xrange"
_EMIT = "hincrby xadd xtrim rpush lindex lpop zscore zrem"
_PUBLISH = f"{_FOLLOW} {_EMIT} hset type llen ltrim zadd"
_COMMANDS = {
    NODE: f"{_PUBLISH} hscan",
    CONDUCTOR: f"{_FOLLOW} {_EMIT} hset hkeys hgetall zadd zremrangebyscore llen pexpire hincrbyfloat hlen",
    OPERATOR: _PUBLISH,
    CLIENT: _READ,
}
_INDEX = ("{%s}:meta", "{%s}:events", "{%s}:marks", "{%s}:leases", "{%s}:node:*", "{%s}:log:*")
_KEYS = {
    NODE: (*_INDEX, "{%s}:experts", "%s:objects:*"),
    CONDUCTOR: (
        *_INDEX,
        *("{%s}:conductors", "{%s}:facts", "{%s}:planner", "{%s}:stream:*", "{%s}:responses:*"),
        *("{%s}:usage:*", "{%s}:first_nodes", "{%s}:rollout", "{%s}:canaries", "{%s}:canary:*"),
    ),
    OPERATOR: _INDEX,
    CLIENT: ("{%s}:meta", "{%s}:leases", "{%s}:node:*", "{%s}:log:*"),
}


@dataclass(frozen=True, slots=True)
class RedisUser:
    role: str
    name: str
    line: str  # of the ACL file: without the password
    url: str  # with the password


def redis_users(url: str, namespace: str) -> list[RedisUser]:
    """Users with new passwords for the Redis at ``url``; the user and password in the URL are left out.

    Raises ``StoreError``: an ACL file cannot name this namespace.
    """
    if re.search(r"\s", namespace):
        raise StoreError(f"a Redis ACL cannot name keys with spaces: index.namespace is {namespace!r}")
    return [_user(role, url, namespace) for role in _COMMANDS]


def _user(role: str, url: str, namespace: str) -> RedisUser:
    name, password = f"{namespace}-{role}", secrets.token_urlsafe(32)
    # The name is text, the pattern a glob.
    literal = re.sub(r"([*?\[\]\\])", r"\\\1", namespace)
    # Every model of a cluster but the first has its index in NAMESPACE/NAME.
    keys = " ".join(f"~{pattern % base}" for base in (literal, f"{literal}/*") for pattern in _KEYS[role])
    commands = " ".join(f"+{command}" for command in f"{_CONNECTION} {_COMMANDS[role]}".split())
    digest = sha256(password.encode()).hexdigest()
    line = f"user {name} on #{digest} resetkeys resetchannels {keys} -@all {commands}"
    parts = urlsplit(url)
    hosts = parts.netloc.rpartition("@")[2]
    netloc = f"{quote(name, safe='')}:{password}@{hosts}"
    return RedisUser(role, name, line, urlunsplit(parts._replace(netloc=netloc)))
