-- What sandboxes used, every few seconds; later, of each minute the first alone.
CREATE TABLE samples (
    sandbox       TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    at            INTEGER NOT NULL,
    -- Of all its processors together.
    cpu_per_mille INTEGER NOT NULL CHECK (cpu_per_mille BETWEEN 0 AND 1000),
    memory        INTEGER NOT NULL,
    disk          INTEGER NOT NULL,
    PRIMARY KEY (sandbox, at)
) STRICT, WITHOUT ROWID;

CREATE INDEX samples_by_age ON samples (at);
