-- What teams keep for the headers of requests, sealed: the key is not in here.
CREATE TABLE secrets (
    id         TEXT NOT NULL PRIMARY KEY,
    team       TEXT NOT NULL REFERENCES teams (id),
    name       TEXT NOT NULL,
    -- Counts values, from 1.
    version    INTEGER NOT NULL CHECK (version > 0),
    sealed     BLOB NOT NULL,
    metadata   TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,
    UNIQUE (team, name)
) STRICT;

CREATE INDEX secrets_by_time ON secrets (team, created_at, id);

-- Services that sandboxes of a team may be let use, and the credential for each, sealed.
CREATE TABLE connections (
    team       TEXT NOT NULL REFERENCES teams (id),
    name       TEXT NOT NULL,
    -- As it was written down, as JSON.
    written    TEXT NOT NULL,
    sealed     BLOB NOT NULL,
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,
    PRIMARY KEY (team, name)
) STRICT, WITHOUT ROWID;

-- Which of them a sandbox may use, as a list of names in JSON. NULL is none.
ALTER TABLE sandboxes ADD COLUMN connections TEXT;
