-- Which key made this one over the API; NULL for the command line of the machine. The other one may be forgotten by now.
ALTER TABLE api_keys ADD COLUMN made_by TEXT;

-- What teams had, minute by minute; a team that had nothing for longer has no rows of that time.
CREATE TABLE team_samples (
    team       TEXT NOT NULL REFERENCES teams (id),
    at         INTEGER NOT NULL,
    -- Sandboxes that were not paused then, and how many were made since the look before, so many milliseconds ago.
    concurrent INTEGER NOT NULL CHECK (concurrent >= 0),
    made       INTEGER NOT NULL CHECK (made >= 0),
    span       INTEGER NOT NULL CHECK (span > 0),
    PRIMARY KEY (team, at)
) STRICT, WITHOUT ROWID;

CREATE INDEX team_samples_by_age ON team_samples (at);
