-- What a client must send to reach the ports of a sandbox; NULL leaves them open, as they were before.
ALTER TABLE sandboxes ADD COLUMN traffic_token TEXT;
-- The Host header that programs inside see, with ${PORT} for the port; NULL is the one that the client sent.
ALTER TABLE sandboxes ADD COLUMN request_host TEXT;

-- Whether who has the key may see what concerns all teams.
ALTER TABLE api_keys ADD COLUMN operator INTEGER NOT NULL DEFAULT 0 CHECK (operator IN (0, 1));

-- One row for each call that changes something, or was to. Rows are only ever added, and removed by their age.
CREATE TABLE audit (
    id      INTEGER PRIMARY KEY AUTOINCREMENT,
    at      INTEGER NOT NULL,
    -- Who: NULL for a call without a valid key, and for the command line on this machine.
    team    TEXT,
    key     TEXT,
    request TEXT NOT NULL CHECK (length(request) BETWEEN 1 AND 128),
    action  TEXT NOT NULL CHECK (length(action) BETWEEN 1 AND 128),
    target  TEXT CHECK (length(target) <= 128),
    -- The status of HTTP.
    status  INTEGER NOT NULL,
    -- Why not, if it was refused or failed.
    detail  TEXT
) STRICT;

CREATE INDEX audit_by_age ON audit (at);
