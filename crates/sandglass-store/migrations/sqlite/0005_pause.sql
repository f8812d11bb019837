-- A sandbox may be 'pausing', 'paused' and 'resuming'. A check can't be changed, so the table is made anew, and with it
-- those that refer to it: to drop a table deletes what refers to its rows.
CREATE TABLE new_sandboxes (
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
    policy                TEXT NOT NULL CHECK (json_valid(policy)),
    -- What a client must send to reach the ports of a sandbox; NULL leaves them open.
    traffic_token         TEXT,
    -- The Host header that programs inside see, with ${PORT} for the port; NULL is the one that the client sent.
    request_host          TEXT,
    state                 TEXT NOT NULL CHECK
        (state IN ('creating', 'running', 'pausing', 'paused', 'resuming', 'ending', 'ended')),
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

CREATE TABLE new_sandbox_metadata (
    sandbox TEXT NOT NULL REFERENCES new_sandboxes (id) ON DELETE CASCADE,
    key     TEXT NOT NULL,
    value   TEXT NOT NULL,
    PRIMARY KEY (sandbox, key)
) STRICT, WITHOUT ROWID;

CREATE TABLE new_events (
    sandbox    TEXT NOT NULL REFERENCES new_sandboxes (id) ON DELETE CASCADE,
    seq        INTEGER NOT NULL CHECK (seq >= 1),
    at         INTEGER NOT NULL,
    state      TEXT NOT NULL,
    end_reason TEXT,
    detail     TEXT NOT NULL,
    PRIMARY KEY (sandbox, seq)
) STRICT, WITHOUT ROWID;

CREATE TABLE new_idempotency_keys (
    team       TEXT NOT NULL REFERENCES teams (id),
    key        TEXT NOT NULL,
    -- Of the request that came under this key.
    digest     TEXT NOT NULL CHECK (length(digest) = 64),
    sandbox    TEXT NOT NULL REFERENCES new_sandboxes (id) ON DELETE CASCADE,
    created_at INTEGER NOT NULL,
    PRIMARY KEY (team, key)
) STRICT, WITHOUT ROWID;

INSERT INTO new_sandboxes
    SELECT id, node, team, template, rootfs, cpus, memory_mib, disk_mib, processes, access_token, metadata, env,
        allow_internet_access, policy, traffic_token, request_host, state, generation, created_at, started_at, end_at,
        max_end_at, ended_at, end_reason, events
    FROM sandboxes;
INSERT INTO new_sandbox_metadata SELECT sandbox, key, value FROM sandbox_metadata;
INSERT INTO new_events SELECT sandbox, seq, at, state, end_reason, detail FROM events;
INSERT INTO new_idempotency_keys SELECT team, key, digest, sandbox, created_at FROM idempotency_keys;

DROP TABLE idempotency_keys;
DROP TABLE events;
DROP TABLE sandbox_metadata;
DROP TABLE sandboxes;
-- What refers to a table follows its new name.
ALTER TABLE new_sandboxes RENAME TO sandboxes;
ALTER TABLE new_sandbox_metadata RENAME TO sandbox_metadata;
ALTER TABLE new_events RENAME TO events;
ALTER TABLE new_idempotency_keys RENAME TO idempotency_keys;

CREATE INDEX sandboxes_by_team ON sandboxes (team, created_at, id);
-- Ended ones pile up; lists and reconcilers ask for the others.
CREATE INDEX sandboxes_live_by_team ON sandboxes (team, created_at, id) WHERE state <> 'ended';
CREATE INDEX sandboxes_by_node ON sandboxes (node, state);
-- At each creation it is summed up what the machine's sandboxes were promised; from this index alone.
CREATE INDEX sandboxes_live_by_node ON sandboxes (node, state, cpus, memory_mib, disk_mib) WHERE state <> 'ended';
CREATE INDEX idempotency_keys_by_age ON idempotency_keys (created_at);
CREATE INDEX idempotency_keys_by_sandbox ON idempotency_keys (sandbox);
