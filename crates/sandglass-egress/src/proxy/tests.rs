mod bounds;
mod http;
mod tls;
mod world;
