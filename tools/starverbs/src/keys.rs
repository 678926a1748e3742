//! `starverbs keys`: hands a file with keys of 1RMA's regions to those who may open them, over TLS 1.3.
//!
//! Both ends show a certificate. What is in the file is its owner's business; a client gets all of it as it
//! is then, so that keys that are to come are there before they are needed.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use clap::Subcommand;
use rustls::client::Resumption;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{
    ClientConfig, ClientConnection, ConnectionCommon, RootCertStore, ServerConfig, ServerConnection,
    StreamOwned,
};

use crate::Failure;

/// How long one end waits for the other.
const PATIENCE: Duration = Duration::from_secs(10);
/// Most bytes of a file.
const LONGEST: u64 = 1 << 20;
/// Most clients at a time, and of one address.
const CLIENTS: usize = 64;
const OF_ADDRESS: usize = 8;

/// Hand out and fetch keys of 1RMA's regions, over TLS
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Hand a file to every client that shows a certificate, until it is ended
    Serve {
        /// The file, such as one of a region's address, number and keys, a line each; read anew for each
        /// client
        file: PathBuf,
        /// Address and port to listen at
        #[arg(long, default_value = "[::]:4795")]
        listen: SocketAddr,
        #[command(flatten)]
        identity: Identity,
    },
    /// Fetch that file
    Fetch {
        /// HOST:PORT of who serves it; its certificate must be of that name or address
        from: String,
        /// Where to put it, for this user alone, in place of what was there
        #[arg(short, long)]
        output: PathBuf,
        /// Fetch it again after so many seconds, for ever
        #[arg(long, value_name = "SECS", value_parser = clap::value_parser!(u64).range(1..))]
        watch: Option<u64>,
        #[command(flatten)]
        identity: Identity,
    },
}

/// Who this end is, and whom it believes. Files in PEM.
#[derive(clap::Args)]
struct Identity {
    /// This end's certificate, and those that lead to the other end's authority
    #[arg(long)]
    cert: PathBuf,
    /// Its private key
    #[arg(long)]
    key: PathBuf,
    /// Authorities, one of which has signed the other end's certificate
    #[arg(long)]
    ca: PathBuf,
}

pub(crate) fn keys(args: &Args) -> Result<(), Failure> {
    // SAFETY: nothing runs yet that has a handler. An end that is gone is an error of a write's, no signal.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    match &args.what {
        What::Serve { file, listen, identity } => serve(file, *listen, identity),
        What::Fetch { from, output, watch, identity } => {
            let config = Arc::new(client_config(identity)?);
            let once = || fetch(from, output, &config);
            let Some(seconds) = watch else { return once() };
            loop {
                /* who watches goes on with the keys that it has */
                if let Err(failure) = once() {
                    say(format_args!("{}", failure.message));
                }
                std::thread::sleep(Duration::from_secs(*seconds));
            }
        }
    }
}

fn failed(what: impl std::fmt::Display) -> impl Fn(&dyn std::fmt::Display) -> Failure {
    move |why| Failure::new(1, format!("{what}: {why}"))
}

impl Identity {
    fn certificates(&self) -> Result<Vec<CertificateDer<'static>>, Failure> {
        let read = CertificateDer::pem_file_iter(&self.cert).and_then(Iterator::collect::<Result<Vec<_>, _>>);
        let all = read.map_err(|error| failed(self.cert.display())(&error))?;
        if all.is_empty() { Err(failed(self.cert.display())(&"no certificate in there")) } else { Ok(all) }
    }

    fn private_key(&self) -> Result<PrivateKeyDer<'static>, Failure> {
        PrivateKeyDer::from_pem_file(&self.key).map_err(|error| failed(self.key.display())(&error))
    }

    fn authorities(&self) -> Result<Arc<RootCertStore>, Failure> {
        let wrong = failed(self.ca.display());
        let mut store = RootCertStore::empty();
        for authority in CertificateDer::pem_file_iter(&self.ca).map_err(|error| wrong(&error))? {
            let authority = authority.map_err(|error| wrong(&error))?;
            store.add(authority).map_err(|error| wrong(&error))?;
        }
        if store.is_empty() { Err(wrong(&"no certificate in there")) } else { Ok(Arc::new(store)) }
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn server_config(identity: &Identity) -> Result<ServerConfig, Failure> {
    let wrong = failed("TLS");
    let clients = WebPkiClientVerifier::builder_with_provider(identity.authorities()?, provider());
    let clients = clients.build().map_err(|error| wrong(&error))?;
    let config = ServerConfig::builder_with_provider(provider()).with_protocol_versions(&[&TLS13]);
    let config = config.map_err(|error| wrong(&error))?.with_client_cert_verifier(clients);
    let config = config.with_single_cert(identity.certificates()?, identity.private_key()?);
    let mut config = config.map_err(|error| failed(identity.cert.display())(&error))?;
    /* a session that is taken up again looks at no certificate, which may have ended */
    (config.send_tls13_tickets, config.session_storage) = (0, Arc::new(NoServerSessionStorage {}));
    Ok(config)
}

fn client_config(identity: &Identity) -> Result<ClientConfig, Failure> {
    let config = ClientConfig::builder_with_provider(provider()).with_protocol_versions(&[&TLS13]);
    let config = config.map_err(|error| failed("TLS")(&error))?;
    let config = config.with_root_certificates(identity.authorities()?);
    let config = config.with_client_auth_cert(identity.certificates()?, identity.private_key()?);
    let mut config = config.map_err(|error| failed(identity.cert.display())(&error))?;
    config.resumption = Resumption::disabled();
    Ok(config)
}

fn serve(file: &Path, listen: SocketAddr, identity: &Identity) -> Result<(), Failure> {
    let config = Arc::new(server_config(identity)?);
    contents(file).map_err(|error| failed(file.display())(&error))?;
    let listener = TcpListener::bind(listen).map_err(|error| failed(listen)(&error))?;
    let at = listener.local_addr().unwrap_or(listen);
    println!("{} at {at}", file.display());
    let clients = Clients::default();
    std::thread::scope(|scope| {
        for client in listener.incoming() {
            /* out of descriptors: some client will end */
            let Ok(client) = client else {
                std::thread::sleep(Duration::from_millis(100));
                continue;
            };
            let Some(place) = clients.enter(&client) else { continue };
            let config = Arc::clone(&config);
            let work = move || {
                if let Err(error) = hand_out(file, client, config) {
                    say(format_args!("{}: {error}", place.address));
                }
            };
            if let Err(error) = std::thread::Builder::new().spawn_scoped(scope, work) {
                say(format_args!("a client is not served: {error}"));
            }
        }
        Ok(())
    })
}

/// Says something on standard error, which may be gone.
fn say(what: std::fmt::Arguments<'_>) {
    _ = writeln!(io::stderr(), "starverbs: {what}");
}

/// The addresses of the clients that there are.
#[derive(Default)]
struct Clients(Mutex<Vec<IpAddr>>);

/// A client's place among them, until this is dropped.
struct ClientPlace<'a> {
    clients: &'a Clients,
    address: IpAddr,
}

impl Clients {
    fn addresses(&self) -> MutexGuard<'_, Vec<IpAddr>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for a client. `None`: there are enough, and of one address fewer than of all, so that nobody
    /// keeps all others out.
    fn enter(&self, client: &TcpStream) -> Option<ClientPlace<'_>> {
        let address = client.peer_addr().ok()?.ip();
        let mut all = self.addresses();
        let room = all.len() < CLIENTS && all.iter().filter(|one| **one == address).count() < OF_ADDRESS;
        if !room {
            say(format_args!("{address}: not served, there are too many"));
            return None;
        }
        all.push(address);
        Some(ClientPlace { clients: self, address })
    }
}

impl Drop for ClientPlace<'_> {
    fn drop(&mut self) {
        let mut all = self.clients.addresses();
        if let Some(at) = all.iter().position(|one| *one == self.address) {
            all.swap_remove(at);
        }
    }
}

/// The file, all of it. Not one that is longer than what a client takes.
fn contents(file: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(file)?.take(LONGEST + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > LONGEST { Err(io::Error::other("longer than 1 MiB")) } else { Ok(bytes) }
}

/// Gives a client the file, once it has shown its certificate, for which it has little time: those who have
/// none are not to keep others out.
fn hand_out(file: &Path, mut client: TcpStream, config: Arc<ServerConfig>) -> io::Result<()> {
    let deadline = Deadline::new(&client)?;
    let mut tls = ServerConnection::new(config).map_err(io::Error::other)?;
    deadline.shake_hands(&mut tls, &mut client)?;
    let mut tls = StreamOwned::new(tls, client);
    tls.write_all(&contents(file)?)?;
    tls.conn.send_close_notify();
    tls.flush()
}

/// When an exchange must be over.
struct Deadline(Instant);

impl Deadline {
    /// From now on, for what is read; a write waits as long.
    fn new(stream: &TcpStream) -> io::Result<Deadline> {
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Deadline(Instant::now() + PATIENCE))
    }

    /// Has the next read wait no longer.
    fn bound(&self, stream: &TcpStream) -> io::Result<()> {
        let left = self.0.checked_duration_since(Instant::now()).filter(|left| !left.is_zero());
        stream.set_read_timeout(Some(left.ok_or(io::ErrorKind::TimedOut)?))
    }

    fn shake_hands<D>(&self, tls: &mut ConnectionCommon<D>, stream: &mut TcpStream) -> io::Result<()> {
        while tls.is_handshaking() {
            while tls.wants_write() {
                tls.write_tls(stream)?;
            }
            if !tls.is_handshaking() {
                break;
            }
            self.bound(stream)?;
            if tls.read_tls(stream)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            if let Err(error) = tls.process_new_packets() {
                /* it hears why, if it still listens */
                _ = tls.write_tls(stream);
                return Err(io::Error::other(error));
            }
        }
        Ok(())
    }
}

fn fetch(from: &str, output: &Path, config: &Arc<ClientConfig>) -> Result<(), Failure> {
    let bytes = receive(from, config).map_err(|error| failed(from)(&error))?;
    replace(output, &bytes).map_err(|error| failed(output.display())(&error))
}

fn receive(from: &str, config: &Arc<ClientConfig>) -> io::Result<Vec<u8>> {
    let host = from.rsplit_once(':').map_or(from, |(host, _)| host).trim_matches(['[', ']']);
    let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
    let mut refused = io::Error::other("no such host");
    let connect = |at: SocketAddr| TcpStream::connect_timeout(&at, PATIENCE);
    let stream = from.to_socket_addrs()?.find_map(|at| connect(at).map_err(|error| refused = error).ok());
    let mut stream = stream.ok_or(refused)?;
    let deadline = Deadline::new(&stream)?;
    let mut tls = ClientConnection::new(Arc::clone(config), name).map_err(io::Error::other)?;
    deadline.shake_hands(&mut tls, &mut stream)?;
    let (mut tls, mut bytes, mut piece) = (StreamOwned::new(tls, stream), Vec::new(), [0; 1 << 14]);
    loop {
        deadline.bound(&tls.sock)?;
        /* an end without TLS's own close is an error: half a file is none */
        match tls.read(&mut piece)? {
            0 => return Ok(bytes),
            len if (bytes.len() + len) as u64 > LONGEST => return Err(io::Error::other("longer than 1 MiB")),
            len => bytes.extend_from_slice(piece.get(..len).unwrap_or_default()),
        }
    }
}

/// Puts the bytes there for this user alone; who reads the file meanwhile finds the old ones, or these.
fn replace(output: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut beside = output.as_os_str().to_owned();
    beside.push(format!(".{}", std::process::id()));
    let beside = Path::new(&beside);
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(beside)?;
    let written = file.write_all(bytes).and_then(|()| fs::rename(beside, output));
    written.inspect_err(|_| drop(fs::remove_file(beside)))
}
