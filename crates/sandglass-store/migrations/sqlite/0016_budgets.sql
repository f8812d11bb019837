-- Budgets of money: one row for each, which is the only word on what is left of it.
CREATE TABLE budgets (
    id         TEXT NOT NULL PRIMARY KEY CHECK (length(id) = 20),
    team       TEXT NOT NULL REFERENCES teams (id),
    -- Micro-dollars, as all money here.
    most       INTEGER NOT NULL CHECK (most >= 0),
    reserved   INTEGER NOT NULL DEFAULT 0 CHECK (reserved >= 0),
    charged    INTEGER NOT NULL DEFAULT 0 CHECK (charged >= 0),
    -- What providers billed above what was set aside: the operator's, and nothing of the budget.
    overrun    INTEGER NOT NULL DEFAULT 0 CHECK (overrun >= 0),
    -- The table of prices that holds for all of it.
    prices     TEXT NOT NULL CHECK (length(prices) = 64),
    created_at INTEGER NOT NULL,
    closed_at  INTEGER,
    CHECK (reserved + charged <= most)
) STRICT;

CREATE INDEX budgets_by_team ON budgets (team, created_at);

-- Calls of models: one row for each that something was set aside for.
CREATE TABLE calls (
    id         TEXT NOT NULL PRIMARY KEY,
    budget     TEXT NOT NULL REFERENCES budgets (id),
    model      TEXT NOT NULL,
    -- The day that it counts for, since 1970.
    day        INTEGER NOT NULL,
    reserved   INTEGER NOT NULL CHECK (reserved >= 0),
    -- NULL until it is settled.
    charged    INTEGER CHECK (charged BETWEEN 0 AND reserved),
    overrun    INTEGER NOT NULL DEFAULT 0 CHECK (overrun >= 0),
    estimated  INTEGER NOT NULL DEFAULT 0,
    -- What was used, as JSON.
    usage      TEXT,
    asked_at   INTEGER NOT NULL,
    settled_at INTEGER,
    CHECK ((charged IS NULL) = (settled_at IS NULL))
) STRICT;

CREATE INDEX calls_by_budget ON calls (budget, asked_at, id);
CREATE INDEX calls_held ON calls (asked_at) WHERE settled_at IS NULL;

-- What a team spends, day by day, for its caps.
CREATE TABLE spending (
    team     TEXT NOT NULL REFERENCES teams (id),
    day      INTEGER NOT NULL,
    reserved INTEGER NOT NULL DEFAULT 0 CHECK (reserved >= 0),
    charged  INTEGER NOT NULL DEFAULT 0 CHECK (charged >= 0),
    PRIMARY KEY (team, day)
) STRICT, WITHOUT ROWID;
