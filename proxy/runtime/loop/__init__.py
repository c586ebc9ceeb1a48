"""The event loop's extensions: an epoll reactor, ticks, deadlines, timers, scoped tasks."""
