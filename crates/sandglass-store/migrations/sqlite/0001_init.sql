-- Times are milliseconds since the Unix epoch, ids and digests are text, maps are JSON objects.
-- A file of this folder never changes once it has been released; add the next one instead.

-- Facts about this store. 'node' is the id of the machine, made once.
CREATE TABLE meta (
    key   TEXT PRIMARY KEY,
    value TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE teams (
    id         TEXT PRIMARY KEY,
    name       TEXT NOT NULL UNIQUE CHECK (length(name) BETWEEN 1 AND 128),
    created_at INTEGER NOT NULL,
    revoked_at INTEGER
) STRICT, WITHOUT ROWID;

-- The secret itself is nowhere: a copy of this file lets nobody in.
CREATE TABLE api_keys (
    id           TEXT PRIMARY KEY,
    team         TEXT NOT NULL REFERENCES teams (id),
    name         TEXT NOT NULL CHECK (length(name) BETWEEN 1 AND 128),
    digest       TEXT NOT NULL UNIQUE CHECK (length(digest) = 64),
    suffix       TEXT NOT NULL CHECK (length(suffix) <= 8),
    created_at   INTEGER NOT NULL,
    last_used_at INTEGER,
    revoked_at   INTEGER
) STRICT, WITHOUT ROWID;

CREATE INDEX api_keys_by_team ON api_keys (team, created_at, id);

CREATE TABLE sandboxes (
    id                    TEXT NOT NULL PRIMARY KEY CHECK (length(id) = 20),
    node                  TEXT NOT NULL,
    team                  TEXT NOT NULL REFERENCES teams (id),
    template              TEXT NOT NULL,
    rootfs                TEXT NOT NULL CHECK (length(rootfs) = 64),
    cpus                  INTEGER NOT NULL,
    memory_mib            INTEGER NOT NULL,
    disk_mib              INTEGER NOT NULL,
    processes             INTEGER NOT NULL,
    access_token          TEXT,
    metadata              TEXT NOT NULL CHECK (json_valid(metadata)),
    env                   TEXT NOT NULL CHECK (json_valid(env)),
    allow_internet_access INTEGER CHECK (allow_internet_access IN (0, 1)),
    state                 TEXT NOT NULL CHECK (state IN ('creating', 'running', 'ending', 'ended')),
    generation            INTEGER NOT NULL CHECK (generation >= 1),
    created_at            INTEGER NOT NULL,
    -- When it first was 'running'; a create request that never got there may be repeated under its key.
    started_at            INTEGER,
    end_at                INTEGER NOT NULL CHECK (end_at <= max_end_at),
    max_end_at            INTEGER NOT NULL,
    ended_at              INTEGER,
    end_reason            TEXT,
    -- How many events it has, so that they are numbered without gaps.
    events                INTEGER NOT NULL CHECK (events >= 1)
) STRICT;

CREATE INDEX sandboxes_by_team ON sandboxes (team, created_at, id);
-- Ended ones pile up; lists and reconcilers ask for the others.
CREATE INDEX sandboxes_live_by_team ON sandboxes (team, created_at, id) WHERE state <> 'ended';
CREATE INDEX sandboxes_by_node ON sandboxes (node, state);

-- The same pairs as in sandboxes.metadata, for filters. JSON functions cut keys and values at a NUL; this doesn't.
CREATE TABLE sandbox_metadata (
    sandbox TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    key     TEXT NOT NULL,
    value   TEXT NOT NULL,
    PRIMARY KEY (sandbox, key)
) STRICT, WITHOUT ROWID;

CREATE TABLE events (
    sandbox    TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    seq        INTEGER NOT NULL CHECK (seq >= 1),
    at         INTEGER NOT NULL,
    state      TEXT NOT NULL,
    end_reason TEXT,
    detail     TEXT NOT NULL,
    PRIMARY KEY (sandbox, seq)
) STRICT, WITHOUT ROWID;

CREATE TABLE idempotency_keys (
    team       TEXT NOT NULL REFERENCES teams (id),
    key        TEXT NOT NULL,
    -- Of the request that came under this key.
    digest     TEXT NOT NULL CHECK (length(digest) = 64),
    sandbox    TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    created_at INTEGER NOT NULL,
    PRIMARY KEY (team, key)
) STRICT, WITHOUT ROWID;

CREATE INDEX idempotency_keys_by_age ON idempotency_keys (created_at);
CREATE INDEX idempotency_keys_by_sandbox ON idempotency_keys (sandbox);
