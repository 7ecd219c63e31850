//! The numbers of the specification: kinds of messages, and protocol features.

use std::fmt;

/// Protocol feature bits, as masks.
pub(crate) mod protocol {
    macro_rules! bits {
        ($($name:ident = $bit:literal),+ $(,)?) => {
            $(pub(crate) const $name: u64 = 1 << $bit;)+

            /// The specification's name of the lowest bit in `mask`, for error messages.
            pub(crate) fn name(mask: u64) -> &'static str {
                match mask & mask.wrapping_neg() {
                    $($name => concat!("VHOST_USER_PROTOCOL_F_", stringify!($name)),)+
                    _ => "an unnamed protocol feature",
                }
            }
        };
    }
    bits! {
        MQ = 0, LOG_SHMFD = 1, RARP = 2, REPLY_ACK = 3, MTU = 4, BACKEND_REQ = 5, CROSS_ENDIAN = 6, CRYPTO_SESSION = 7,
        PAGEFAULT = 8, CONFIG = 9, BACKEND_SEND_FD = 10, HOST_NOTIFIER = 11, INFLIGHT_SHMFD = 12, RESET_DEVICE = 13,
        INBAND_NOTIFICATIONS = 14, CONFIGURE_MEM_SLOTS = 15, STATUS = 16, XEN_MMAP = 17, SHARED_OBJECT = 18,
        DEVICE_STATE = 19, GET_VRING_BASE_INFLIGHT = 20, GPA_ADDRESSES = 21, SHMEM = 22,
        // Netmem's own bits. The specification assigns bits in ascending order, and is far from
        // these. With `NETMEM_RINGS` the answer to `GET_QUEUE_NUM` is known to count rings, the
        // control queue included if the device serves one.
        NETMEM_RINGS = 61, NETMEM_SPLIT = 62,
    }
}

/// The kind of a front end's message, by the specification's number. It prints as the
/// specification's name.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Request(pub u32);

macro_rules! requests {
    ($($name:ident = $number:literal),+ $(,)?) => {
        #[allow(missing_docs)]
        impl Request {
            $(pub const $name: Self = Self($number);)+

            /// The specification's name, without its prefix.
            #[must_use]
            pub const fn name(self) -> Option<&'static str> {
                match self {
                    $(Self::$name => Some(stringify!($name)),)+
                    _ => None,
                }
            }
        }
    };
}

requests! {
    GET_FEATURES = 1, SET_FEATURES = 2, SET_OWNER = 3, RESET_OWNER = 4, SET_MEM_TABLE = 5, SET_LOG_BASE = 6,
    SET_LOG_FD = 7, SET_VRING_NUM = 8, SET_VRING_ADDR = 9, SET_VRING_BASE = 10, GET_VRING_BASE = 11, SET_VRING_KICK = 12,
    SET_VRING_CALL = 13, SET_VRING_ERR = 14, GET_PROTOCOL_FEATURES = 15, SET_PROTOCOL_FEATURES = 16, GET_QUEUE_NUM = 17,
    SET_VRING_ENABLE = 18, SEND_RARP = 19, NET_SET_MTU = 20, SET_BACKEND_REQ_FD = 21, IOTLB_MSG = 22,
    SET_VRING_ENDIAN = 23, GET_CONFIG = 24, SET_CONFIG = 25, CREATE_CRYPTO_SESSION = 26, CLOSE_CRYPTO_SESSION = 27,
    POSTCOPY_ADVISE = 28, POSTCOPY_LISTEN = 29, POSTCOPY_END = 30, GET_INFLIGHT_FD = 31, SET_INFLIGHT_FD = 32,
    GPU_SET_SOCKET = 33, RESET_DEVICE = 34, VRING_KICK = 35, GET_MAX_MEM_SLOTS = 36, ADD_MEM_REG = 37, REM_MEM_REG = 38,
    SET_STATUS = 39, GET_STATUS = 40, GET_SHARED_OBJECT = 41, SET_DEVICE_STATE_FD = 42, CHECK_DEVICE_STATE = 43,
    GET_SHMEM_CONFIG = 44,
}

impl Request {
    /// Whether the specification defines an answer to the message, which is sent whether or not the
    /// front end has set "an answer is wanted".
    pub(crate) fn has_answer(self) -> bool {
        matches!(
            self,
            Self::GET_FEATURES
                | Self::SET_LOG_BASE
                | Self::GET_VRING_BASE
                | Self::GET_PROTOCOL_FEATURES
                | Self::GET_QUEUE_NUM
                | Self::GET_CONFIG
                | Self::CREATE_CRYPTO_SESSION
                | Self::POSTCOPY_ADVISE
                | Self::POSTCOPY_END
                | Self::GET_INFLIGHT_FD
                | Self::GET_MAX_MEM_SLOTS
                | Self::GET_STATUS
                | Self::GET_SHARED_OBJECT
                | Self::SET_DEVICE_STATE_FD
                | Self::CHECK_DEVICE_STATE
                | Self::GET_SHMEM_CONFIG
        )
    }
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "message {}", self.0),
        }
    }
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
