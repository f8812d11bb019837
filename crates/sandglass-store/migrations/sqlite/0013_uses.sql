-- What was made from a snapshot, and when: it is asked of each whether anything was of late.
CREATE INDEX sandboxes_by_snapshot ON sandboxes (made_from, created_at) WHERE origin = 'snapshot';
