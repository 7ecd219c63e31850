//! What a link does to packets, and the text form of it that `--link` of the command reads.

use std::fmt;
use std::num::NonZeroU64;
use std::str::FromStr;
use std::time::Duration;

/// What a link does to packets. The default is a perfect link.
///
/// As text it is a list such as
/// `loss=1%,delay=10ms,jitter=1ms,reorder=1%,duplicate=0.1%,corrupt=0.1%,rate=100M,seed=7`; options
/// that are left out have their defaults.
///
/// ```
/// use netmem_netem::LinkOptions;
/// use std::time::Duration;
///
/// let options: LinkOptions = "loss=1%,delay=10ms,rate=100M".parse()?;
/// assert_eq!((options.loss, options.delay), (0.01, Duration::from_millis(10)));
/// assert_eq!(options.rate.map(|rate| rate.get()), Some(100_000_000));
/// let error = "loss=0.5".parse::<LinkOptions>().unwrap_err();
/// assert_eq!(error.to_string(), "loss=0.5: a share has a percent sign, such as loss=1%");
/// # Ok::<(), netmem_netem::LinkError>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LinkOptions {
    /// The share of packets that do not arrive, from 0 to 1.
    pub loss: f64,
    /// The time from the moment that a packet was sent, at the link's rate, to its arrival.
    pub delay: Duration,
    /// The delay varies by as much, up and down, evenly. The order of packets does not change: a
    /// packet arrives with the one before it or later.
    pub jitter: Duration,
    /// The share of packets that are not delayed, and so overtake the packets on the link.
    pub reorder: f64,
    /// The share of packets that arrive twice. The two copies arrive one after the other, at the
    /// same time.
    pub duplicate: f64,
    /// The share of packets in which one bit is changed.
    pub corrupt: f64,
    /// Bits in a second. A packet occupies the link for as long as its bytes take at this rate,
    /// also one that is lost later.
    pub rate: Option<NonZeroU64>,
    /// The seed of the faults.
    pub seed: u64,
}

/// Why a text is no [`LinkOptions`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LinkError {
    /// The text is empty.
    #[error("an option is needed, such as loss=1%")]
    Empty,
    /// Not of the form `name=value`.
    #[error("`{0}` is not NAME=VALUE, such as loss=1%")]
    Form(String),
    /// No such option.
    #[error("`{0}` is no option; there are loss, delay, jitter, reorder, duplicate, corrupt, rate, seed")]
    Name(String),
    /// The option occurs twice.
    #[error("`{0}` is given twice")]
    Twice(String),
    /// Not a share in percent.
    #[error("{name}={value}: a share has a percent sign, such as {name}=1%")]
    Percent {
        /// The option.
        name: &'static str,
        /// Its value in the text.
        value: String,
    },
    /// A share that is no number from 0 to 100.
    #[error("{name}={value}: a share is from 0% to 100%")]
    Share {
        /// The option.
        name: &'static str,
        /// Its value in the text.
        value: String,
    },
    /// Not a time.
    #[error("{name}={value}: a time is a number and us, ms or s, at most an hour, such as {name}=10ms")]
    Time {
        /// The option.
        name: &'static str,
        /// Its value in the text.
        value: String,
    },
    /// Not a rate.
    #[error(
        "rate={0}: a rate is a number of bits per second from 1000 to 1000G, such as rate=100M; there are k, M and G"
    )]
    Rate(String),
    /// Not a seed.
    #[error("seed={0}: a seed is a whole number")]
    Seed(String),
    /// A variation of more than the delay.
    #[error("jitter={jitter:?} is more than delay={delay:?}: the delay varies by as much, up and down")]
    Jitter {
        /// The variation.
        jitter: Duration,
        /// The delay.
        delay: Duration,
    },
    /// Reordering without a delay: packets can only overtake others that are delayed.
    #[error("reorder needs a delay: packets overtake those that are delayed")]
    NoDelay,
}

fn share(name: &'static str, text: &str) -> Result<f64, LinkError> {
    let value = || text.to_owned();
    let Some(number) = text.strip_suffix('%') else { return Err(LinkError::Percent { name, value: value() }) };
    let percent = number.parse().ok().filter(|percent| (0.0..=100.0).contains(percent));
    percent.map(|percent| percent / 100.0).ok_or_else(|| LinkError::Share { name, value: value() })
}

/// A number with a suffix, which is its unit.
fn scaled(text: &str, units: &[(&str, f64)]) -> Option<f64> {
    let (number, suffix) = text.split_at(text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len()));
    let (_, unit) = units.iter().find(|(name, _)| *name == suffix)?;
    Some(number.parse::<f64>().ok()? * unit)
}

fn time(name: &'static str, text: &str) -> Result<Duration, LinkError> {
    let nanos = scaled(text, &[("us", 1e3), ("ms", 1e6), ("s", 1e9)]).filter(|nanos| (0.0..=3600e9).contains(nanos));
    let nanos = nanos.ok_or_else(|| LinkError::Time { name, value: text.to_owned() })?;
    Ok(Duration::from_nanos(nanos.round() as u64))
}

fn rate(text: &str) -> Result<Option<NonZeroU64>, LinkError> {
    let bits =
        scaled(text, &[("", 1.0), ("k", 1e3), ("M", 1e6), ("G", 1e9)]).filter(|bits| (1e3..=1e12).contains(bits));
    let bits = bits.and_then(|bits| NonZeroU64::new(bits.round() as u64));
    bits.map(Some).ok_or_else(|| LinkError::Rate(text.to_owned()))
}

impl FromStr for LinkOptions {
    type Err = LinkError;

    fn from_str(text: &str) -> Result<Self, LinkError> {
        if text.is_empty() {
            return Err(LinkError::Empty);
        }
        let (mut options, mut given) = (Self::default(), Vec::new());
        for part in text.split(',') {
            let (name, value) = part.split_once('=').ok_or_else(|| LinkError::Form(part.to_owned()))?;
            match name {
                "loss" => options.loss = share("loss", value)?,
                "delay" => options.delay = time("delay", value)?,
                "jitter" => options.jitter = time("jitter", value)?,
                "reorder" => options.reorder = share("reorder", value)?,
                "duplicate" => options.duplicate = share("duplicate", value)?,
                "corrupt" => options.corrupt = share("corrupt", value)?,
                "rate" => options.rate = rate(value)?,
                "seed" => options.seed = value.parse().map_err(|_| LinkError::Seed(value.to_owned()))?,
                _ => return Err(LinkError::Name(name.to_owned())),
            }
            if given.contains(&name) {
                return Err(LinkError::Twice(name.to_owned()));
            }
            given.push(name);
        }
        let Self { delay, jitter, reorder, .. } = options;
        if jitter > delay {
            return Err(LinkError::Jitter { jitter, delay });
        }
        if reorder > 0.0 && delay.is_zero() {
            return Err(LinkError::NoDelay);
        }
        Ok(options)
    }
}

/// The list that [`FromStr`] reads, with all options that differ from the default.
impl fmt::Display for LinkOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shares = |list: &[(&str, f64)]| -> Vec<String> {
            list.iter()
                .filter(|(_, share)| *share > 0.0)
                .map(|(name, share)| format!("{name}={}%", (share * 1e8).round() / 1e6))
                .collect()
        };
        let mut parts = shares(&[("loss", self.loss)]);
        let times = [("delay", self.delay), ("jitter", self.jitter)];
        let millis = |(name, time): (&str, Duration)| format!("{name}={}ms", time.as_nanos() as f64 / 1e6);
        parts.extend(times.into_iter().filter(|(_, time)| !time.is_zero()).map(millis));
        parts.extend(shares(&[("reorder", self.reorder), ("duplicate", self.duplicate), ("corrupt", self.corrupt)]));
        parts.extend(self.rate.map(|rate| format!("rate={rate}")));
        parts.push(format!("seed={}", self.seed));
        f.write_str(&parts.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(text: &str) -> LinkOptions {
        text.parse().unwrap()
    }

    #[test]
    fn options_are_read_and_shown() {
        let all = "loss=1%,delay=10ms,jitter=1.5ms,reorder=1%,duplicate=0.1%,corrupt=0.1%,rate=100000000,seed=7";
        assert_eq!(options(all).to_string(), all);
        let other = "rate=0.1G,seed=7,corrupt=0.1%,duplicate=0.1%,reorder=1%,jitter=1500us,delay=0.01s,loss=1%";
        assert_eq!(options(all), options(other));
        assert_eq!(options("seed=0"), LinkOptions::default());
        assert_eq!(options("loss=100%").loss, 1.0);
        for (text, says) in [
            ("", "an option is needed"),
            ("loss", "`loss` is not NAME=VALUE"),
            ("loss=1%,", "`` is not NAME=VALUE"),
            ("los=1%", "there are loss, delay"),
            ("loss=1%,loss=2%", "`loss` is given twice"),
            ("loss=1", "percent sign, such as loss=1%"),
            ("reorder=101%", "reorder=101%: a share is from 0% to 100%"),
            ("corrupt=-1%", "from 0%"),
            ("corrupt=nan%", "from 0%"),
            ("delay=10", "us, ms or s"),
            ("delay=10m", "us, ms or s"),
            ("delay=-1ms", "us, ms or s"),
            ("jitter=2h", "such as jitter=10ms"),
            ("delay=3601s", "at most an hour"),
            ("rate=0", "rate=0: a rate is"),
            ("rate=1T", "there are k, M and G"),
            ("rate=infG", "there are k"),
            ("seed=x", "whole number"),
            ("delay=1ms,jitter=2ms", "jitter=2ms is more than delay=1ms"),
            ("reorder=1%", "reorder needs a delay"),
        ] {
            let error = text.parse::<LinkOptions>().unwrap_err().to_string();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
