-- How long nobody may use a sandbox before the same happens as when its time is up, in milliseconds; NULL is for ever.
ALTER TABLE sandboxes ADD COLUMN idle_timeout INTEGER CHECK (idle_timeout > 0);
