"""Secrets: values that come in and never go out."""

from __future__ import annotations

import pytest
from e2b import Secret
from e2b.exceptions import RateLimitException, SecretException, SecretNotFoundException

pytestmark = pytest.mark.newest_sdk


def test_a_secret_is_made_changed_found_and_destroyed(server):
    made = Secret.create("a key", "the first value", metadata={"for": "tests"})
    assert (made.name, made.version, made.metadata) == ("a key", 1, {"for": "tests"})
    changed = Secret.update("a key", "the second value")
    assert (changed.secret_id, changed.version, changed.metadata) == (made.secret_id, 2, {"for": "tests"})
    assert changed.updated_at >= changed.created_at == made.created_at
    assert Secret.update(made.secret_id, "the third value", metadata={}).metadata == {}
    assert Secret.get_info(made.secret_id) == Secret.get_info("a key")
    assert made.secret_id in [one.secret_id for one in Secret.list().next_items()]
    with pytest.raises(SecretException, match="409: .*already"):
        Secret.create("a key", "the fourth value")
    with pytest.raises(SecretException, match="8 to 4096 bytes"):
        Secret.create("short", "short")
    assert Secret.destroy(made.secret_id)
    assert not Secret.exists("a key")
    assert not Secret.destroy("a key")
    with pytest.raises(SecretNotFoundException):
        Secret.update("a key", "the fifth value")


def test_secrets_are_listed_page_by_page(server):
    made = [Secret.create(f"page {number}", "some value").secret_id for number in range(3)]
    pages, found = Secret.list(limit=1), []
    while pages.has_next:
        found += [one.secret_id for one in pages.next_items()]
    assert [one for one in found if one in made] == made[::-1]
    for one in made:
        assert Secret.destroy(one)


async def test_all_of_it_without_blocking(server):
    from e2b import AsyncSecret

    made = await AsyncSecret.create("async", "the first value")
    assert (await AsyncSecret.update("async", "the second value")).version == 2
    assert made.secret_id in [one.secret_id for one in await AsyncSecret.list().next_items()]
    assert await AsyncSecret.exists(made.secret_id)
    assert await AsyncSecret.destroy("async")
    assert not await AsyncSecret.exists("async")


async def test_a_team_has_so_many_and_no_more(lone_server):
    import httpx

    async with httpx.AsyncClient(base_url=lone_server.url, headers=lone_server.headers, timeout=60) as client:
        for number in range(1000):
            answer = await client.post("/secrets", json={"name": str(number), "value": "some value"})
            assert answer.status_code == 201, answer.text
        answer = await client.post("/secrets", json={"name": "more", "value": "some value"})
        assert (answer.status_code, answer.json()["error_code"]) == (429, "secret_limit_reached")
    with pytest.raises(RateLimitException):
        Secret.create("more", "some value", **{**lone_server.opts, "retries": 0})
