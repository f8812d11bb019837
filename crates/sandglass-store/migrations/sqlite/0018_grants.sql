-- Who may call models, at the cost of which budget, with tokens that were made for which sandbox: this one, or the one that it was
-- forked from.
ALTER TABLE sandboxes ADD COLUMN models_budget TEXT REFERENCES budgets (id);
ALTER TABLE sandboxes ADD COLUMN models_origin TEXT CHECK ((models_origin IS NULL) = (models_budget IS NULL));

CREATE INDEX sandboxes_by_budget ON sandboxes (models_budget) WHERE models_budget IS NOT NULL;

-- Whether a budget is closed when no sandbox is left that may spend it. Others are closed by who opened them.
ALTER TABLE budgets ADD COLUMN with_sandboxes INTEGER NOT NULL DEFAULT 0;

CREATE INDEX budgets_with_sandboxes ON budgets (created_at) WHERE with_sandboxes AND closed_at IS NULL;

-- Tables of prices, each under the digest of what it says. They never change, so a budget is charged by the one that it began with.
CREATE TABLE prices (
    digest TEXT NOT NULL PRIMARY KEY CHECK (length(digest) = 64),
    models TEXT NOT NULL
) STRICT, WITHOUT ROWID;
