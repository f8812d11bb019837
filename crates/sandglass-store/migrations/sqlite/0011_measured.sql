-- What an image takes on the disk is measured when somebody asks, and not kept. A last column can't be dropped behind a
-- comment, so the table is made anew; nothing refers to it.
CREATE TABLE new_snapshots (
    id         TEXT NOT NULL PRIMARY KEY CHECK (length(id) = 20),
    -- The machine that has the image.
    node       TEXT NOT NULL,
    -- Whose sandbox it is of. A 'template' is for all teams.
    team       TEXT NOT NULL REFERENCES teams (id),
    -- A 'fork' is there for one request, and no client ever sees it.
    purpose    TEXT NOT NULL CHECK (purpose IN ('snapshot', 'fork', 'template')),
    name       TEXT CHECK ((name IS NULL) = (tag IS NULL)),
    tag        TEXT,
    -- That of its source; of a 'template', its own name.
    template   TEXT NOT NULL,
    rootfs     TEXT NOT NULL CHECK (length(rootfs) = 64),
    cpus       INTEGER NOT NULL,
    memory_mib INTEGER NOT NULL,
    disk_mib   INTEGER NOT NULL,
    processes  INTEGER NOT NULL,
    -- User, folder and environment of commands; NULL is as the server's own template of that name says.
    defaults   TEXT CHECK (json_valid(defaults)),
    -- What a 'template' is besides: its base, what it starts, when it is ready, its pool.
    spec       TEXT CHECK (json_valid(spec) AND (purpose = 'template') = (spec IS NOT NULL)),
    -- The sandbox that it is of, which may have ended long ago, and its generation at that moment.
    source     TEXT NOT NULL CHECK (length(source) = 20),
    generation INTEGER NOT NULL CHECK (generation >= 1),
    state      TEXT NOT NULL CHECK (state IN ('writing', 'ready', 'deleting')),
    created_at INTEGER NOT NULL
) STRICT;

INSERT INTO new_snapshots
    SELECT id, node, team, purpose, name, tag, template, rootfs, cpus, memory_mib, disk_mib, processes, defaults, spec,
        source, generation, state, created_at
    FROM snapshots;
DROP TABLE snapshots;
ALTER TABLE new_snapshots RENAME TO snapshots;

-- A name is that of one snapshot at a time: the newest.
CREATE UNIQUE INDEX snapshots_by_name ON snapshots (team, name, tag) WHERE state = 'ready' AND name IS NOT NULL;
-- And that of one image of a template on a machine.
CREATE UNIQUE INDEX templates_by_name ON snapshots (node, template) WHERE state = 'ready' AND purpose = 'template';
CREATE INDEX snapshots_by_team ON snapshots (team, created_at, id);
CREATE INDEX snapshots_by_node ON snapshots (node, state);
