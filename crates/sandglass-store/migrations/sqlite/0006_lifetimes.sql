-- How long a sandbox lives when nobody says otherwise, in milliseconds, and what happens when its time is up.
ALTER TABLE sandboxes ADD COLUMN timeout INTEGER NOT NULL DEFAULT 300000 CHECK (timeout >= 0);
ALTER TABLE sandboxes ADD COLUMN on_timeout TEXT NOT NULL DEFAULT 'kill' CHECK
    (on_timeout IN ('kill', 'pause', 'pause_auto_resume', 'pause_filesystem'));
-- What its last pause keeps, or kept.
ALTER TABLE sandboxes ADD COLUMN pause_mode TEXT NOT NULL DEFAULT 'full' CHECK (pause_mode IN ('full', 'filesystem'));
