-- How a sandbox came to be: from its template, or as a copy of a snapshot or of another sandbox, whose id 'made_from' is.
ALTER TABLE sandboxes ADD COLUMN origin TEXT NOT NULL DEFAULT 'template' CHECK (origin IN ('template', 'snapshot', 'fork'));
ALTER TABLE sandboxes ADD COLUMN made_from TEXT CHECK ((origin = 'template') = (made_from IS NULL));

-- Images that sandboxes are made from: one row for each, from before it is written until after it is removed.
CREATE TABLE snapshots (
    id         TEXT NOT NULL PRIMARY KEY CHECK (length(id) = 20),
    -- The machine that has the image.
    node       TEXT NOT NULL,
    team       TEXT NOT NULL REFERENCES teams (id),
    -- A 'fork' is there for one request, and no client ever sees it.
    purpose    TEXT NOT NULL CHECK (purpose IN ('snapshot', 'fork')),
    name       TEXT CHECK ((name IS NULL) = (tag IS NULL)),
    tag        TEXT,
    template   TEXT NOT NULL,
    rootfs     TEXT NOT NULL CHECK (length(rootfs) = 64),
    cpus       INTEGER NOT NULL,
    memory_mib INTEGER NOT NULL,
    disk_mib   INTEGER NOT NULL,
    processes  INTEGER NOT NULL,
    -- The sandbox that it is of, which may have ended long ago, and its generation at that moment.
    source     TEXT NOT NULL CHECK (length(source) = 20),
    generation INTEGER NOT NULL CHECK (generation >= 1),
    state      TEXT NOT NULL CHECK (state IN ('writing', 'ready', 'deleting')),
    created_at INTEGER NOT NULL,
    -- What it takes on the disk, once it is 'ready'.
    bytes      INTEGER NOT NULL DEFAULT 0 CHECK (bytes >= 0)
) STRICT;

-- A name is that of one snapshot at a time: the newest.
CREATE UNIQUE INDEX snapshots_by_name ON snapshots (team, name, tag) WHERE state = 'ready' AND name IS NOT NULL;
CREATE INDEX snapshots_by_team ON snapshots (team, created_at, id);
CREATE INDEX snapshots_by_node ON snapshots (node, state);
