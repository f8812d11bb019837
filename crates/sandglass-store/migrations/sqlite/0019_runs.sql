-- Runs: one row for each, until what it left is not to be kept any more. Its money has rows of its own, which stay.
CREATE TABLE runs (
    id           TEXT NOT NULL PRIMARY KEY CHECK (id GLOB 'run_????????????????????'),
    node         TEXT NOT NULL,
    team         TEXT NOT NULL REFERENCES teams (id),
    status       TEXT NOT NULL,
    -- Where its sandbox is, and which one that is once it has one.
    sandbox      TEXT NOT NULL DEFAULT 'none',
    sandbox_id   TEXT,
    stop_reason  TEXT,
    -- The same in words.
    detail       TEXT,
    budget       TEXT NOT NULL UNIQUE REFERENCES budgets (id),
    -- As JSON: all of it that may be kept.
    spec         TEXT NOT NULL,
    -- NULL if it is not kept.
    prompt       TEXT,
    prompt_bytes INTEGER NOT NULL CHECK (prompt_bytes >= 0),
    turns        INTEGER NOT NULL DEFAULT 0 CHECK (turns >= 0),
    -- What its sandbox came to, as JSON, once it is known.
    compute      TEXT,
    -- How many events it has; the last one has this number.
    events       INTEGER NOT NULL DEFAULT 0 CHECK (events >= 0),
    created_at   INTEGER NOT NULL,
    started_at   INTEGER,
    ended_at     INTEGER,
    cancelled_at INTEGER,
    -- When nothing of it is to be left.
    forget_at    INTEGER NOT NULL,
    CHECK ((ended_at IS NOT NULL) = (status IN ('completed', 'failed', 'cancelled'))),
    CHECK (ended_at IS NULL OR sandbox IN ('none', 'destroyed', 'destroy_failed'))
) STRICT;

CREATE INDEX runs_by_team ON runs (team, created_at, id);
CREATE INDEX runs_under_way ON runs (node, created_at, id) WHERE ended_at IS NULL;
CREATE INDEX runs_by_sandbox ON runs (sandbox_id) WHERE sandbox_id IS NOT NULL;
CREATE INDEX runs_to_forget ON runs (forget_at);

-- What happened to a run, without gaps.
CREATE TABLE run_events (
    run    TEXT NOT NULL REFERENCES runs (id) ON DELETE CASCADE,
    seq    INTEGER NOT NULL CHECK (seq > 0),
    at     INTEGER NOT NULL,
    -- Who says so: 'host', 'gateway', 'worker' or 'verifier'.
    source TEXT NOT NULL,
    type   TEXT NOT NULL,
    data   TEXT NOT NULL,
    PRIMARY KEY (run, seq)
) STRICT, WITHOUT ROWID;

CREATE TABLE run_keys (
    team       TEXT NOT NULL REFERENCES teams (id),
    key        TEXT NOT NULL,
    -- Of the request that came under this key.
    digest     TEXT NOT NULL CHECK (length(digest) = 64),
    run        TEXT NOT NULL REFERENCES runs (id) ON DELETE CASCADE,
    created_at INTEGER NOT NULL,
    PRIMARY KEY (team, key)
) STRICT, WITHOUT ROWID;

CREATE INDEX run_keys_by_age ON run_keys (created_at);
CREATE INDEX run_keys_by_run ON run_keys (run);

-- What a run left.
CREATE TABLE artifacts (
    run    TEXT NOT NULL REFERENCES runs (id) ON DELETE CASCADE,
    number INTEGER NOT NULL CHECK (number > 0),
    -- NULL if it is not kept.
    path   TEXT,
    mode   INTEGER NOT NULL,
    size   INTEGER NOT NULL CHECK (size >= 0),
    sha256 TEXT CHECK (length(sha256) = 64),
    PRIMARY KEY (run, number),
    UNIQUE (run, path)
) STRICT;

-- Its content, in pieces.
CREATE TABLE artifact_pieces (
    run    TEXT NOT NULL,
    number INTEGER NOT NULL,
    piece  INTEGER NOT NULL CHECK (piece >= 0),
    bytes  BLOB NOT NULL,
    PRIMARY KEY (run, number, piece),
    FOREIGN KEY (run, number) REFERENCES artifacts (run, number) ON DELETE CASCADE
) STRICT;
