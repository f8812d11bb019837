// Templates: what there is of them, and what the SDK knows and this version lacks. That is refused in clear words, and never
// by a success that is none.

import assert from "node:assert/strict";
import { test } from "node:test";
import { Template } from "e2b";
import { failure, shared } from "./support.mjs";

const box = shared();

test("templates of the server are found by name", async () => {
  assert.equal(await Template.exists("base"), true);
  assert.equal(await Template.exists("no-such-template"), false);
  const [tag] = await Template.getTags("base");
  assert.equal(tag.tag, "default");
});

test("what is not built says so", async () => {
  const { sandbox } = box;
  const calls = {
    templates: () => Template.build(Template().fromImage("debian:12"), "own"),
  };
  for (const [what, call] of Object.entries(calls)) {
    const error = await failure(Error, call());
    assert.match(error.message, /not supported by this version of sandglass/, what);
  }
  assert.equal(await sandbox.isRunning(), true);
});
