-- Volumes: one row for each, from before it is made until after it is removed.
CREATE TABLE volumes (
    id         TEXT NOT NULL PRIMARY KEY CHECK (length(id) = 20),
    -- The machine that has it.
    node       TEXT NOT NULL,
    team       TEXT NOT NULL REFERENCES teams (id),
    name       TEXT NOT NULL,
    size_mib   INTEGER NOT NULL CHECK (size_mib > 0),
    -- Worth the content of this volume, and nothing else.
    token      TEXT NOT NULL CHECK (length(token) = 64),
    state      TEXT NOT NULL CHECK (state IN ('making', 'ready', 'deleting')),
    created_at INTEGER NOT NULL
) STRICT;

CREATE UNIQUE INDEX volumes_by_name ON volumes (team, name) WHERE state <> 'deleting';
CREATE INDEX volumes_by_node ON volumes (node, state);

-- The volumes of a sandbox, and of all that is made from an image, as JSON: id, name and path of each. NULL is none.
ALTER TABLE sandboxes ADD COLUMN volumes TEXT;
ALTER TABLE snapshots ADD COLUMN volumes TEXT;
