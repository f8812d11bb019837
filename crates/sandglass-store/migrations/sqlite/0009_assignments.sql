-- Whose sandbox is whose, and was: the last of a user's has no 'until'.
CREATE TABLE assignments (
    team    TEXT NOT NULL REFERENCES teams (id),
    user    TEXT NOT NULL CHECK (length(user) > 0),
    -- Counts from 1, per user.
    seq     INTEGER NOT NULL CHECK (seq >= 1),
    sandbox TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    since   INTEGER NOT NULL,
    until   INTEGER,
    PRIMARY KEY (team, user, seq)
) STRICT, WITHOUT ROWID;

-- However many ask at once.
CREATE UNIQUE INDEX assignments_in_force ON assignments (team, user) WHERE until IS NULL;
CREATE INDEX assignments_by_sandbox ON assignments (sandbox);
