//! What the guest's connections lead to, and the bare way there that the proxy is compared with. Each accepts on a thread of its own, and
//! has one or two for each connection.

use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;

/// What is read at once, in bytes.
const CHUNK: usize = 64 << 10;

/// Answers the first bytes of each connection with one byte, and the end of its stream with another.
pub(super) fn answer_all(listener: TcpListener) -> io::Result<Listening> {
    serve(listener, |mut connection| {
        let mut buffer = vec![0; CHUNK];
        let mut first = true;
        while connection.read(&mut buffer)? > 0 {
            if std::mem::take(&mut first) {
                connection.write_all(b"1")?;
            }
        }
        connection.write_all(b"2")
    })
}

/// Connects each connection to the same address, and copies bytes both ways until both streams have ended.
pub(super) fn copy_all(listener: TcpListener, to: SocketAddr) -> io::Result<Listening> {
    serve(listener, move |near| {
        let far = TcpStream::connect(to)?;
        far.set_nodelay(true)?;
        let (near, far) = (Arc::new(near), Arc::new(far));
        let back = {
            let (near, far) = (near.clone(), far.clone());
            thread::Builder::new().spawn(move || copy(&far, &near))?
        };
        copy(&near, &far)?;
        back.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn copy(mut from: &TcpStream, mut to: &TcpStream) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK];
    loop {
        match from.read(&mut buffer)? {
            0 => return to.shutdown(Shutdown::Write),
            n => to.write_all(&buffer[..n])?,
        }
    }
}

/// A listener, until it is dropped: the ledger would see its socket.
#[must_use]
pub(super) struct Listening(Arc<TcpListener>);

impl Drop for Listening {
    fn drop(&mut self) {
        // Wakes the thread that accepts, which then closes it. There is nothing else to do if that fails.
        let _ = rustix::net::shutdown(&self.0, rustix::net::Shutdown::Both);
    }
}

fn serve(
    listener: TcpListener,
    each: impl Fn(TcpStream) -> io::Result<()> + Clone + Send + 'static,
) -> io::Result<Listening> {
    let listener = Arc::new(listener);
    let accepting = listener.clone();
    let accept = move || {
        for connection in accepting.incoming() {
            let (connection, each) = (connection?, each.clone());
            connection.set_nodelay(true)?;
            // How it ended is seen by the guest.
            thread::Builder::new().spawn(move || each(connection))?;
        }
        io::Result::Ok(())
    };
    thread::Builder::new().spawn(accept)?;
    Ok(Listening(listener))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_answered_through_a_copy_loop() {
        let listen = || TcpListener::bind("127.0.0.1:0").unwrap();
        let (upstream, bare) = (listen(), listen());
        let (far, near) = (upstream.local_addr().unwrap(), bare.local_addr().unwrap());
        let _listening = [answer_all(upstream).unwrap(), copy_all(bare, far).unwrap()];
        let mut connection = TcpStream::connect(near).unwrap();
        connection.write_all(&[7; 100_000]).unwrap();
        connection.shutdown(Shutdown::Write).unwrap();
        let mut answers = String::new();
        connection.read_to_string(&mut answers).unwrap();
        assert_eq!(answers, "12");
    }
}
