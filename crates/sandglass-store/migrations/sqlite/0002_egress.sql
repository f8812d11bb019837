-- What the sandbox may reach, as it was asked for. Sandboxes from before could reach nothing, and asked for nothing.
ALTER TABLE sandboxes ADD COLUMN policy TEXT NOT NULL DEFAULT '{"rules":[]}' CHECK (json_valid(policy));
