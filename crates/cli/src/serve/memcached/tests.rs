//! The protocol over a store in plain memory.

use super::answers::{Answers, Output};
use super::commands::BAD_FORMAT;
use super::protocol::{Context, MAX_KEY, Outcome, Session};
use super::store::{Memory, Store};
use std::cell::Cell;
use std::rc::Rc;

/// Bytes in a piece: a long one is sent by reference.
const PIECE: usize = 600;

/// Memory for a limited number of bytes. Dropped pieces are free again.
struct Heap {
    free: Rc<Cell<usize>>,
}

#[derive(Debug)]
struct Piece(Vec<u8>, Rc<Cell<usize>>);

impl Drop for Piece {
    fn drop(&mut self) {
        self.1.set(self.1.get() + self.0.len());
    }
}

impl Memory for Heap {
    type Part = Rc<Piece>;

    /// In small pieces, as if the memory had small pages.
    fn append(&mut self, bytes: &[u8], value: &mut Vec<Rc<Piece>>) -> usize {
        let piece = &bytes[..bytes.len().min(PIECE)];
        let Some(left) = self.free.get().checked_sub(piece.len()) else { return 0 };
        self.free.set(left);
        value.push(Rc::new(Piece(piece.to_vec(), Rc::clone(&self.free))));
        piece.len()
    }

    fn bytes(part: &Rc<Piece>) -> &[u8] {
        &part.0
    }

    fn page(part: &Rc<Piece>) -> usize {
        Rc::as_ptr(part) as usize
    }
}

fn store(free: usize, limit: usize) -> Store<Heap> {
    Store::new(Heap { free: Rc::new(free.into()) }, limit, usize::MAX)
}

fn answered(answers: &mut Answers<Rc<Piece>>) -> Vec<u8> {
    std::iter::from_fn(|| answers.next())
        .flat_map(|(output, _)| match output {
            Output::Text(text) => text,
            Output::Part(part) => part.0.clone(),
        })
        .collect()
}

/// A client's session, and all answers that it has got.
#[derive(Default)]
struct Client {
    session: Session<Rc<Piece>>,
    answered: Vec<u8>,
}

impl Client {
    /// Feeds all bytes as the server does: full answers are sent, and items are evicted if there is
    /// no memory.
    fn feed(&mut self, mut input: &[u8], store: &mut Store<Heap>, now: u64) {
        let (mut answers, mut may_evict) = (Answers::default(), false);
        loop {
            let mut cx = Context { store, now, may_evict, answers: &mut answers };
            let (taken, outcome) = self.session.feed(input, &mut cx);
            input = &input[taken..];
            self.answered.extend(answered(&mut answers));
            match outcome {
                Outcome::Done => return assert!(input.is_empty()),
                Outcome::AnswersFull => may_evict = false,
                Outcome::OutOfPages => may_evict = true,
            }
        }
    }
}

fn talk(store: &mut Store<Heap>, now: u64, input: &str) -> String {
    let mut client = Client::default();
    client.feed(input.as_bytes(), store, now);
    String::from_utf8(client.answered).unwrap()
}

const TALK: &str = "set a 7 0 5\r\nhello\r\nget a\r\n get  a b \r\nadd a 0 0 1\r\nx\r\nreplace b 0 0 1\r\nx\r\nset n 0 0 2 noreply\r\n41\r\n\
    incr n 1\r\nget n\r\ndecr n 100\r\nincr a 1\r\nincr n x\r\ntouch a 100\r\ntouch b 1\r\ndelete a\r\ndelete a 0\r\nget a\r\nset e 0 0 0\r\n\r\n\
    get e\nversion\r\nget\r\nget \r\nverbosity 1\r\n\r\nappend a 0 0 1\r\nx\r\nset a 3 0 2\r\nmm\r\nappend a 9 9 3\r\nend\r\n\
    prepend a 0 0 2 noreply\r\n>>\r\nget a\r\nset a b 0 3\r\nabc\r\nget a\r\nset a 0 0 5\r\nhello, \r\nversion\r\n";

fn answers_of_talk() -> String {
    let version = env!("CARGO_PKG_VERSION");
    format!(
        "STORED\r\nVALUE a 7 5\r\nhello\r\nEND\r\nVALUE a 7 5\r\nhello\r\nEND\r\nNOT_STORED\r\nNOT_STORED\r\n\
         42\r\nVALUE n 0 2\r\n42\r\nEND\r\n0\r\nCLIENT_ERROR cannot increment or decrement non-numeric value\r\n\
         CLIENT_ERROR invalid numeric delta argument\r\nTOUCHED\r\nNOT_FOUND\r\nDELETED\r\nNOT_FOUND\r\nEND\r\nSTORED\r\n\
         VALUE e 0 0\r\n\r\nEND\r\nVERSION netmem {version}\r\nERROR\r\nERROR\r\nOK\r\nERROR\r\nNOT_STORED\r\nSTORED\r\nSTORED\r\n\
         VALUE a 3 7\r\n>>mmend\r\nEND\r\nCLIENT_ERROR bad command line format\r\nVALUE a 3 7\r\n>>mmend\r\nEND\r\n\
         CLIENT_ERROR bad data chunk\r\n"
    )
}

#[test]
fn commands_are_answered() {
    // The last value had two bytes more than were announced: what follows it is not read.
    assert_eq!(talk(&mut store(10_000, 10_000), 1_000_000, TALK), answers_of_talk());
}

/// A client gets the same answers however its bytes are split, and wherever another process
/// continues the session.
#[test]
fn bytes_come_in_any_pieces() {
    for size in 1..40 {
        let (mut store, mut client) = (store(10_000, 10_000), Client::default());
        for piece in TALK.as_bytes().chunks(size) {
            client.feed(piece, &mut store, 1_000_000);
            let saved = postcard::to_stdvec(&std::mem::take(&mut client.session).save::<Heap>()).unwrap();
            let saved: Session<Vec<u8>> = postcard::from_bytes(&saved).unwrap();
            client.session = saved.restore(&mut store);
        }
        assert_eq!(String::from_utf8(client.answered).unwrap(), answers_of_talk(), "pieces of {size}");
        assert!(client.session.is_over());
    }
}

/// What may be a value is never a command: it is received and dropped, or the session is over.
#[test]
fn a_value_is_never_a_command() {
    let key = "k".repeat(MAX_KEY + 1);
    let dropped = |command: &str| (format!("{command}\r\nflush_all\r\n"), true);
    let ended = |command: &str| {
        let end = if command.ends_with("xyz") { "" } else { "\r\n" };
        (format!("{command}{end}flush_all\r\n"), false)
    };
    for (input, goes_on) in [
        dropped("append absent 0 0 9"),
        dropped("prepend absent 0 0 9"),
        dropped("replace absent 0 0 9"),
        dropped("cas absent 0 0 9 1"),
        dropped("cas absent 0 0 9"),
        dropped("cas absent 0 0 9 x"),
        dropped("set other x 0 9"),
        dropped("set other 0 x 9"),
        dropped("set other -1 0 9 noreply"),
        dropped("set other 0 0 9 more words"),
        dropped(&format!("set {key} 0 0 9")),
        ended("set other 0 0 x"),
        ended("set other 0 0 -1"),
        ended("set other 0 0 +9"),
        ended("set other 0 0 9.0"),
        ended("set other 0 0 4294967296"),
        ended("set other 0 0 99999999999999999999"),
        ended("set other 0 0"),
        ended("set other 0 9"),
        ended("set"),
        ended("add other 0 0"),
        ended("set other 0 0 1"),
        ended("set other x 0 1"),
        ended("add k 0 0 1 noreply"),
        // The command stands where the value should have ended.
        ended("set other 0 0 1\r\nxyz"),
        ended("set other x 0 1\r\nxyz"),
        ended("append k 0 0 1\r\nxyz"),
        ended("ms other 9"),
        ended("ms other S9 T0"),
        ended("SET other 0 0 9"),
        ended("set\tother 0 0 9"),
        ended("getx other"),
        ended("gat 0 k"),
        ended("unknown"),
    ] {
        let (mut store, mut client) = (store(10_000, 10_000), Client::default());
        client.feed(b"set k 0 0 1\r\n1\r\n", &mut store, 0);
        client.feed(input.as_bytes(), &mut store, 0);
        assert_eq!(store.get(b"k", 0).map(|item| item.len), Some(1), "the store was emptied: {input:?}");
        assert_eq!(!client.session.is_over(), goes_on, "{input:?}: {}", String::from_utf8_lossy(&client.answered));
        client.answered.clear();
        client.feed(b"get k\r\n", &mut store, 0);
        assert_eq!(!client.answered.is_empty(), goes_on, "{input:?}");
    }
}

/// As memcached does: the value is dropped, the older value is gone after `set` alone, and
/// `noreply` has no answer.
#[test]
fn a_value_that_is_too_large() {
    const TOO_LARGE: &str = "SERVER_ERROR object too large for cache\r\n";
    let large = "y".repeat(2_000_000);
    for (verb, noreply, answer, old) in [
        ("set", "", TOO_LARGE, "END\r\n"),
        ("set", " noreply", "", "END\r\n"),
        ("add", "", TOO_LARGE, "VALUE a 0 1\r\nx\r\nEND\r\n"),
        ("append", " noreply", "", "VALUE a 0 1\r\nx\r\nEND\r\n"),
    ] {
        let mut store = store(10_000_000, 10_000_000);
        let input = format!("set a 0 0 1\r\nx\r\n{verb} a 0 0 2000000{noreply}\r\n{large}\r\nget a\r\n");
        assert_eq!(talk(&mut store, 0, &input), format!("STORED\r\n{answer}{old}"), "{verb}{noreply}");
    }
    // Together they are too long.
    let (mut store, half) = (store(10_000_000, 10_000_000), "y".repeat(600_000));
    let input = format!("set a 0 0 600000\r\n{half}\r\nappend a 0 0 600000\r\n{half}\r\ntouch a 0\r\n");
    assert_eq!(talk(&mut store, 0, &input), "STORED\r\nNOT_STORED\r\nTOUCHED\r\n");
}

/// However many keys a line names, a session keeps one value's pieces and a bounded number of
/// bytes.
#[test]
fn answers_are_bounded_while_a_line_is_processed() {
    const LEN: usize = 1 << 20;
    let mut store = store(4 * LEN, 4 * LEN);
    assert_eq!(talk(&mut store, 0, &format!("set b 0 0 {LEN}\r\n{}\r\n", "x".repeat(LEN))), "STORED\r\n");
    let stats = "stats\r\n".repeat(1000);
    for (line, bytes) in [(format!("get{}\r\n", " b".repeat(4090)), 4090 * LEN), (stats, 150_000)] {
        let (mut session, mut answers) = (Session::default(), Answers::default());
        let (mut input, mut sent) = (line.as_bytes(), 0);
        loop {
            let mut cx = Context { store: &mut store, now: 0, may_evict: false, answers: &mut answers };
            let (taken, outcome) = session.feed(input, &mut cx);
            input = &input[taken..];
            let (mut parts, mut text) = (0, 0);
            while let Some((output, _)) = answers.next() {
                match output {
                    Output::Text(bytes) => text += bytes.len(),
                    Output::Part(part) => {
                        parts += 1;
                        sent += part.0.len();
                    }
                }
            }
            sent += text;
            assert!(parts <= LEN.div_ceil(PIECE) + 1 && text < 20_000, "{parts} pieces and {text} bytes wait");
            if outcome == Outcome::Done {
                break;
            }
        }
        assert!(sent > bytes, "not all was answered: {sent} bytes");
    }
}

/// The keys of a line are processed as they come: neither their number nor the length of the line
/// is bounded.
#[test]
fn a_line_of_keys_may_be_long() {
    let (mut store, mut client) = (store(10_000, 10_000), Client::default());
    client.feed(b"set a 0 0 1\r\nx\r\nget", &mut store, 0);
    for n in 0..10_000 {
        client.feed(format!(" {} a", "k".repeat(n % MAX_KEY + 1)).as_bytes(), &mut store, 0);
        let saved = postcard::to_stdvec(&std::mem::take(&mut client.session).save::<Heap>()).unwrap();
        assert!(saved.len() < 2 * MAX_KEY, "{} bytes are kept", saved.len());
        client.session = postcard::from_bytes::<Session<Vec<u8>>>(&saved).unwrap().restore(&mut store);
    }
    assert!(client.session.has_begun());
    client.feed(b"\r\n", &mut store, 0);
    assert_eq!(client.answered, format!("STORED\r\n{}END\r\n", "VALUE a 0 1\r\nx\r\n".repeat(10_000)).into_bytes());
    assert!(!client.session.has_begun());
}

/// Other lines are bounded, and so are keys.
#[test]
fn lines_and_keys_are_bounded() {
    let mut store = store(10_000, 10_000);
    let line = format!("set {}", " ".repeat(3000));
    assert_eq!(talk(&mut store, 0, &line), "CLIENT_ERROR line too long\r\n");
    assert_eq!(talk(&mut store, 0, &"x".repeat(3000)), "CLIENT_ERROR line too long\r\n");
    assert_eq!(talk(&mut store, 0, &format!("{}get\r\n", " ".repeat(3000))), "ERROR\r\n");
    assert_eq!(talk(&mut store, 0, "quit\r\nversion\r\n"), "");
    let longest = "k".repeat(MAX_KEY);
    let set = format!("set {longest} 0 0 1\r\nx\r\nget a {longest}\r\n");
    assert_eq!(talk(&mut store, 0, &set), format!("STORED\r\nVALUE {longest} 0 1\r\nx\r\nEND\r\n"));
    let bad = String::from_utf8(BAD_FORMAT.into()).unwrap();
    for more in [1, 2, 3, 5000] {
        let long = "k".repeat(MAX_KEY + more);
        for line in [format!("get {long}\r\n"), format!("get a {long} a a\r\n"), format!("delete {}\r\n", &long[..251])]
        {
            assert_eq!(talk(&mut store, 0, &format!("{line}get a\r\n")), format!("{bad}END\r\n"), "{more}");
        }
    }
}

#[test]
fn uniques_guard_changes() {
    let mut store = store(10_000, 10_000);
    assert_eq!(talk(&mut store, 0, "cas a 0 0 1 1\r\nx\r\n"), "NOT_FOUND\r\n");
    talk(&mut store, 0, "set a 0 0 1\r\n1\r\n");
    let answered = talk(&mut store, 0, "gets a\r\n");
    let unique = answered.lines().next().unwrap().rsplit(' ').next().unwrap().to_owned();
    assert_eq!(talk(&mut store, 0, &format!("cas a 0 0 1 {unique}\r\n2\r\n")), "STORED\r\n");
    assert_eq!(
        talk(&mut store, 0, &format!("cas a 0 0 1 {unique}\r\n3\r\nget a\r\n")),
        "EXISTS\r\nVALUE a 0 1\r\n2\r\nEND\r\n"
    );
}

#[test]
fn items_expire() {
    let mut store = store(10_000, 10_000);
    talk(
        &mut store,
        1000,
        "set a 0 10 1\r\n1\r\nset b 0 -1 1\r\n1\r\nset c 0 3000000000 1\r\n1\r\nset d 0 0 1\r\n1\r\n",
    );
    assert_eq!(talk(&mut store, 1009, "get a b c d\r\n").matches("VALUE").count(), 3);
    assert_eq!(talk(&mut store, 1010, "get a b c d\r\n").matches("VALUE").count(), 2);
    assert_eq!(talk(&mut store, 3_000_000_000, "get c d\r\n").matches("VALUE").count(), 1);
    assert_eq!(store.len(), 1);
}

/// Neither the items nor the memory of their values exceed a bound; the item that was used last
/// stays.
#[test]
fn memory_is_bounded() {
    let value = "x".repeat(400);
    for (free, limit, pages) in
        [(5000, 1_000_000, usize::MAX), (1_000_000, 5000, usize::MAX), (1_000_000, 1_000_000, 10)]
    {
        let mut store = Store::new(Heap { free: Rc::new(free.into()) }, limit, pages);
        for n in 0..100 {
            assert_eq!(talk(&mut store, 0, &format!("set k{n} 0 0 400\r\n{value}\r\n")), "STORED\r\n");
            assert!(store.bytes() <= limit);
            assert!(talk(&mut store, 0, "get k0\r\n").len() > 400, "k0 is used all the time");
        }
        assert!((3..13).contains(&store.len()) && store.counts.evictions > 80, "{store:?}");
    }
    // What does not fit at all.
    let mut store = store(300, 5000);
    talk(&mut store, 0, "set a 0 0 1\r\nx\r\n");
    let answered = talk(&mut store, 0, &format!("set a 0 0 400\r\n{value}\r\nget a\r\n"));
    assert_eq!(answered, "SERVER_ERROR out of memory storing object\r\nEND\r\n");
    assert_eq!((store.memory.free.get(), store.bytes()), (300, 0));
}

/// Without memory, each command that needs some stops before it has changed anything, and is
/// carried out when there is.
#[test]
fn a_command_waits_for_memory_before_items_are_evicted() {
    for command in ["set a 0 0 700\r\n", "append n 0 0 700\r\n", "prepend n 0 0 700\r\n", "incr n 1\r\n"] {
        let (mut store, mut client) = (store(1000, 1_000_000), Client::default());
        client.feed(b"set n 0 0 1\r\n1\r\n", &mut store, 0);
        let free = store.memory.free.replace(0);
        let value = if command.starts_with('i') { String::new() } else { format!("{}\r\n", "2".repeat(700)) };
        let input = format!("{command}{value}version\r\n");
        let (mut at, mut answers) = (0, Answers::default());
        for _ in 0..3 {
            let mut cx = Context { store: &mut store, now: 0, may_evict: false, answers: &mut answers };
            let (taken, outcome) = client.session.feed(&input.as_bytes()[at..], &mut cx);
            assert_eq!(outcome, Outcome::OutOfPages, "{command:?}");
            assert!(client.session.has_work() || at + taken < input.len());
            at += taken;
        }
        assert!(answered(&mut answers).is_empty() && store.counts.evictions == 0, "{command:?}: {store:?}");
        store.memory.free.set(free + 2000);
        client.answered.clear();
        client.feed(&input.as_bytes()[at..], &mut store, 0);
        let answer = if command.starts_with('i') { "2\r\n" } else { "STORED\r\n" };
        let expected = format!("{answer}VERSION netmem {}\r\n", env!("CARGO_PKG_VERSION"));
        assert_eq!(String::from_utf8_lossy(&client.answered), expected, "{command:?}");
        assert_eq!(store.counts.evictions, 0);
    }
}

/// A value that is being sent stays what it was.
#[test]
fn values_in_flight_do_not_change() {
    let (mut store, mut answers) = (store(10_000, 10_000), Answers::default());
    let old = "o".repeat(1000);
    talk(&mut store, 0, &format!("set a 0 0 1000\r\n{old}\r\n"));
    let mut cx = Context { store: &mut store, now: 0, may_evict: false, answers: &mut answers };
    Session::default().feed(b"get a\r\n", &mut cx);
    talk(&mut store, 0, "set a 0 0 3\r\nnew\r\ndelete a\r\nflush_all\r\n");
    assert_eq!(answered(&mut answers), format!("VALUE a 0 1000\r\n{old}\r\nEND\r\n").into_bytes());
}
