//! Attempts to use up what the machine has. Each has an end by itself, where nothing stops it before.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};

use super::{Attack, Last, hold, number, tell};

/// By name.
pub(super) const ATTACKS: &[(&str, Attack)] = &[
    ("fork", fork),
    ("allocate", allocate),
    ("fill", fill),
    ("files", files),
    ("burn", burn),
    ("descriptors-many", descriptors),
    ("flood", flood),
    ("stop-agent", stop_agent),
    ("leave", leave),
    ("find", find),
    ("daemons", daemons),
];

const MIB: usize = 1 << 20;

/// Where something might outlive its sandbox.
const PLACES: [&str; 6] = ["/tmp", "/dev/shm", "/var/tmp", "/root", "/home/user", "/usr/lib"];

/// Starts processes that only wait, as many as there may be and at most so many; and holds them.
fn fork(args: &[String]) -> io::Result<()> {
    let most: u32 = number(args, 0)?;
    let mut children = 0;
    let mut last = Last::default();
    while children < most {
        // SAFETY: this process has one thread, and the child makes one system call and never returns.
        match unsafe { libc::fork() } {
            -1 => {
                last.see(Err(io::Error::last_os_error()));
                break;
            }
            0 => loop {
                // SAFETY: takes no pointer.
                unsafe { libc::pause() };
            },
            _ => children += 1,
        }
    }
    tell(format!("{children} processes").as_bytes())?;
    hold(())
}

/// Uses so many MiB of memory, one after the other with a pause of so many milliseconds in between; and holds them.
fn allocate(args: &[String]) -> io::Result<()> {
    let (most, pause): (usize, u64) = (number(args, 0)?, number(args, 1)?);
    let mut held = Vec::new();
    for _ in 0..most {
        // Random bytes would be more honest and much slower; a byte that is not 0 in each page does.
        held.push(vec![0x5a_u8; MIB]);
        if pause > 0 {
            std::thread::sleep(Duration::from_millis(pause));
        }
    }
    hold(held)
}

/// Writes so many MiB to a file.
fn fill(args: &[String]) -> io::Result<()> {
    let most: usize = number(args, 0)?;
    let chunk = vec![0xa5_u8; MIB];
    let mut file = File::create("filling")?;
    for _ in 0..most {
        file.write_all(&chunk)?;
    }
    file.sync_all()
}

/// Makes so many files.
fn files(args: &[String]) -> io::Result<()> {
    let most: u32 = number(args, 0)?;
    fs::create_dir_all("many")?;
    for index in 0..most {
        // In folders, or the longest of them would be what takes the time.
        if index % 1000 == 0 {
            fs::create_dir_all(format!("many/{}", index / 1000))?;
        }
        File::create(format!("many/{}/{index}", index / 1000))?;
    }
    Ok(())
}

/// Keeps so many processors busy for so many milliseconds, each by a process in a session of its own: a kernel may give
/// every session the same share, however few of them its neighbour has.
fn burn(args: &[String]) -> io::Result<()> {
    let (processes, time): (usize, u64) = (number(args, 0)?, number(args, 1)?);
    let end = Instant::now() + Duration::from_millis(time);
    let mut last = Last::default();
    for _ in 0..processes {
        // SAFETY: this process has one thread.
        match unsafe { libc::fork() } {
            -1 => {
                last.see(Err(io::Error::last_os_error()));
                break;
            }
            0 => {
                // Whoever ends the first of them ends all.
                rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
                rustix::process::setsid()?;
                while Instant::now() < end {}
                return Ok(());
            }
            _ => last.see(Ok(())),
        }
    }
    while Instant::now() < end {
        std::thread::sleep(Duration::from_millis(100));
    }
    last.into_result()
}

/// Opens so many files, in so many processes; and holds them.
fn descriptors(args: &[String]) -> io::Result<()> {
    let (each, processes): (usize, u32) = (number(args, 0)?, number(args, 1)?);
    // Of the disk, so that somebody outside may have to have it open as well.
    let file = std::env::current_exe()?;
    for _ in 0..processes {
        // SAFETY: this process has one thread.
        if unsafe { libc::fork() } == 0 {
            let held: Vec<File> = std::iter::from_fn(|| File::open(&file).ok()).take(each).collect();
            std::thread::sleep(Duration::from_secs(60));
            drop(held);
            return Ok(());
        }
    }
    std::thread::sleep(Duration::from_secs(2));
    hold(())
}

/// Writes so many MiB to standard output.
fn flood(args: &[String]) -> io::Result<()> {
    let most: usize = number(args, 0)?;
    let chunk = vec![b'y'; MIB];
    let mut out = io::stdout().lock();
    (0..most).try_for_each(|_| out.write_all(&chunk))
}

/// Stops the agent, so that nobody inside can end anything any more.
fn stop_agent(args: &[String]) -> io::Result<()> {
    let agent = Pid::from_raw(number(args, 0)?).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(rustix::process::kill_process(agent, Signal::STOP)?)
}

/// Puts a text wherever it might outlive the sandbox.
fn leave(args: &[String]) -> io::Result<()> {
    let text = super::argument(args, 0)?;
    let mut last = Last::default();
    for place in PLACES {
        last.see(fs::write(format!("{place}/left-behind"), text));
    }
    last.into_result()
}

/// Tells what an earlier sandbox left.
fn find(_: &[String]) -> io::Result<()> {
    for place in PLACES {
        if let Ok(content) = fs::read(format!("{place}/left-behind")) {
            tell(&content)?;
        }
    }
    Ok(())
}

/// Starts so many processes that leave their session and their parent, again and again; and ends.
fn daemons(args: &[String]) -> io::Result<()> {
    let most: u32 = number(args, 0)?;
    for _ in 0..most {
        // SAFETY: this process has one thread, and the children make system calls and never return.
        unsafe {
            if libc::fork() == 0 {
                libc::setsid();
                if libc::fork() != 0 {
                    libc::_exit(0);
                }
                loop {
                    libc::pause();
                }
            }
        }
    }
    Ok(())
}
