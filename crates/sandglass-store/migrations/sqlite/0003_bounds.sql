-- At each creation it is summed up what the machine's sandboxes were promised; from this index alone.
CREATE INDEX sandboxes_live_by_node ON sandboxes (node, state, cpus, memory_mib, disk_mib) WHERE state <> 'ended';

-- The limit on processes has another name since.
UPDATE sandboxes SET end_reason = 'pids' WHERE end_reason = 'processes';
UPDATE events SET end_reason = 'pids' WHERE end_reason = 'processes';
