// A page that is read from the disk may start no worker. There, the search runs in a hidden frame instead, which needs no server.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.appendChild(this.frame)
      const inside = this.frame.contentWindow
      this.heard = event => {
        if (event.source !== inside) return
        const told = new MessageEvent("message", { data: event.data })
        this.dispatchEvent(told)
        if (this.onmessage) this.onmessage(told)
      }
      addEventListener("message", this.heard)
      inside.document.open()
      inside.document.write(`<body><script>
        self.postMessage = data => parent.dispatchEvent(new MessageEvent("message", { data, source: self }))
        self.importScripts = (...urls) => urls.reduce((done, url) => done.then(() => new Promise((ready, failed) => {
          const script = document.createElement("script")
          script.src = url
          script.onload = ready
          script.onerror = failed
          document.body.appendChild(script)
        })), Promise.resolve())
      <\/script><script src="${url}"><\/script></body>`)
      this.ready = new Promise(ready => inside.addEventListener("load", ready))
      inside.document.close()
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {
      removeEventListener("message", this.heard)
      this.frame.remove()
    }
  }
}
