//! Settings that the scripts make with `sysctl`, `ip`, `tc` and `ethtool`. Commands with these
//! names, which come first in `PATH`, write each setting to a file of a directory. This module
//! reads the files when the settings are needed.

use std::path::PathBuf;

/// The settings of the host. A stack reads a setting when it needs it, because scripts change them.
///
/// They are in a directory, which has a file for each setting with the value. A setting without a
/// file has the default value of Linux.
#[derive(Clone, Debug)]
pub struct Settings(PathBuf);

impl Settings {
    pub(crate) fn new(directory: impl Into<PathBuf>) -> Self {
        Self(directory.into())
    }

    fn text(&self, name: &str) -> Option<String> {
        std::fs::read_to_string(self.0.join(name)).ok()
    }

    /// The `n`-th number of a setting, or `otherwise`.
    #[must_use]
    pub fn nth(&self, name: &str, n: usize, otherwise: u64) -> u64 {
        self.text(name).and_then(|text| text.split_whitespace().nth(n)?.parse().ok()).unwrap_or(otherwise)
    }

    /// The first number of a setting, or `otherwise`: `tcp_ecn`.
    #[must_use]
    pub fn number(&self, name: &str, otherwise: u64) -> u64 {
        self.nth(name, 0, otherwise)
    }

    /// Whether a setting is not 0. Without a value it is on.
    #[must_use]
    pub fn is_on(&self, name: &str) -> bool {
        self.number(name, 1) != 0
    }

    /// Whether the setting contains this word.
    #[must_use]
    pub fn has(&self, name: &str, word: &str) -> bool {
        self.text(name).is_some_and(|text| text.split_whitespace().any(|w| w == word))
    }

    /// The number after a word, in the format of `ip route`: `advmss 600 mtu lock 640`.
    #[must_use]
    pub fn after(&self, name: &str, word: &str) -> Option<u64> {
        let text = self.text(name)?;
        let mut words = text.split_whitespace().skip_while(|w| *w != word).skip(1).filter(|w| *w != "lock");
        words.next()?.parse().ok()
    }

    /// Whether the queue accepts no packets: `tc qdisc replace dev tun0 root pfifo limit 0`.
    #[must_use]
    pub fn queue_is_full(&self) -> bool {
        self.after("qdisc", "limit") == Some(0)
    }
}
