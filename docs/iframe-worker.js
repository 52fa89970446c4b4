// Search runs in a Worker, which browsers refuse to pages that are opened from a folder. There, a hidden frame takes its place.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.onmessage = null
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      this.scope = frame.contentWindow
      this.scope.document.write("<body></body>")
      this.scope.document.close()
      this.scope.postMessage = data => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        if (this.onmessage) this.onmessage(event)
      }
      // Scripts are loaded one after the other; what they wait for is all of them.
      this.scope.importScripts = (...urls) => urls.reduce((before, each) => before.then(() => this.load(each)), Promise.resolve())
      this.ready = this.load(url)
    }
    load(url) {
      return new Promise((resolve, reject) => {
        const script = this.scope.document.createElement("script")
        Object.assign(script, { src: url, onload: resolve, onerror: reject })
        this.scope.document.body.appendChild(script)
      })
    }
    postMessage(data) {
      this.ready.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {
      this.scope.frameElement.remove()
    }
  }
}
