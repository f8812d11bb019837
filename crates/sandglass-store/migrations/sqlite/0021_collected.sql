-- When what a run left was collected, or given up: from then on its sandbox may go.
ALTER TABLE runs ADD COLUMN collected_at INTEGER;
